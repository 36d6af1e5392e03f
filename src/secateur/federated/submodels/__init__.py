"""Federations whose clients train sub-models of the server's model (mapp_fl).

Read rules.py first: a rule says which channels a client trains. structure.py makes a smaller model of them and maps it
back, federation.py has the rounds, clients.py trains the clients of a round.
"""
