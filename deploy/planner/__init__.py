"""``paceline plan``: does speculation pay on hardware that nobody has rented yet?"""
