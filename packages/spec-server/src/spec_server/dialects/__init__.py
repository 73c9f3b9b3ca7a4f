"""Answers, one file per endpoint: whole and streamed."""
