"""Ways to give away less, one file each; each is an argument at the place where it acts."""

# the strongest attacker known, of defenses that share it
NATURAL = "on natural pictures also ig-smooth"
AGAINST_PRUNING = f"adaptive=support or reapply, {NATURAL}; with error feedback on a trained residual"
AGAINST_WITHHOLDING = f"rob:adaptive=fill; of passive ones sgi:adaptive=support:follows=true, {NATURAL}"
IN_OUT = 16  # models of the strongest attacker on members
AGAINST_NOTHING = f"lira or rmia on {IN_OUT} in-out models (--in-out {IN_OUT})"
IMITATING = "that have the same defense (--adaptive)"
AGAINST_TRAINING = f"{AGAINST_NOTHING} {IMITATING}"
AGAINST_PRIVACY = f"{AGAINST_TRAINING}, bounded by epsilon"
