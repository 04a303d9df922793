"""HTTP: connections, hosts, keys, errors, event streams and the files of the page."""
