"""Other people's software for the same work, to compare with. Each runs in a venv of its own: see requirements.txt."""
