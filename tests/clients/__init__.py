"""Real clients against one server: `make test-clients`. They are no part of `make test`."""
