"""The demo pipeline's own data and networks: real digits on real photo texture, found and then read.

``pages`` makes inputs with known truth and needs no torch; ``networks`` holds the variants of both stages;
``train`` makes their weights anew and measures their accuracy.
"""
