"""Against no speculation: what each speculator and policy gains."""
