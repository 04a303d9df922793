"""Under load: servers with many users, failures and neighbours."""
