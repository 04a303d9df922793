"""Models larger than memory: models, memory limits, engines and pages."""
