"""Records texts with their drafts' proposals, and replays policies over them without a model."""
