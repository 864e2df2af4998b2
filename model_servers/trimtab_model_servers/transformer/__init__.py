"""A vision transformer whose number of tokens is chosen batch by batch. Pure tensor mathematics; knows no server.

``schedule`` counts, ``rules`` merges, ``transformer`` runs, ``tasks`` holds what differs between tasks, ``stored``
reads and writes weights, also those of torchvision and timm.
"""
