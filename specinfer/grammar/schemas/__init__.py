"""JSON schemas, written anew as schemas that the library can hold."""
