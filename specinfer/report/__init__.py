"""What every report needs: prompts to ask, where its figures come from, a file to stand in."""
