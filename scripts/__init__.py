"""Programs for people who work on this project; none is part of an installation."""
