"""Speculation: its speed and costs against runs without it."""
