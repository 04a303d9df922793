"""Fields of request bodies: parsing, the names of other servers, sampling parameters."""
