"""What benchmarks/offload.py measures on, in which memory, beside whom, and the page it writes."""
