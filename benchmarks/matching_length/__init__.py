"""What policy_matching_length.py predicts, and by what it decides then."""
