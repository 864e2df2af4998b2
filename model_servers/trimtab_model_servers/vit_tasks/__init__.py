"""A small vision transformer and four tasks of real images: how it is trained, prompted and measured.

``sources`` cuts the images, ``fit`` trains, ``measure`` counts, ``train`` does it all and writes the weights.
"""
