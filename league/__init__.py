"""The league: what the code of different authors reaches on the same images; see README.md."""
