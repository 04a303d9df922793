"""Models, memory limits, engines and the page of benchmarks/offload.py."""
