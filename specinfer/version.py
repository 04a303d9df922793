"""The version, alone, so that it can be read without importing anything."""

VERSION = "0.5.0"
