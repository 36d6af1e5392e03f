"""Federations whose clients train sub-models of the server's model (mapp_fl).

Read rules/__init__.py first: a rule says which channels a client trains. cutting.py makes a smaller model of them and
maps it back, federation.py has the rounds, crowd.py trains the clients of a round.
"""
