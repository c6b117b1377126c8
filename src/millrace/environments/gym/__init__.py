"""Tasks and rewards of reasoning-gym, and what was measured of its families."""
