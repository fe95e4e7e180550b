"""Draws the pictures of docs/explanation: `scripts/draw-pictures` writes docs/pictures/*.svg anew."""
