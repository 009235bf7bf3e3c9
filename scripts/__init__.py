"""Programs for work on the project; none is part of an installation."""
