"""Fields of request bodies: parsing, field names of other servers, sampling parameters."""
