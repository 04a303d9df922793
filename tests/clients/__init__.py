"""Published clients against one server (`make test-clients`); not part of `make test`."""
