"""`specinfer check`: test on the user's own models that speculation does not change the output."""
