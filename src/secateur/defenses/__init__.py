"""Ways to give away less, one file each; each is an argument at the place where it acts."""

# the strongest attacker known, of defenses that share it
AGAINST_PRUNING = "adaptive=support or reapply; with error feedback support and follows=true, on a trained residual"
AGAINST_WITHHOLDING = (
    "rob:adaptive=fill; of passive ones sgi:adaptive=support:follows=true, also rounds=N on repeated batches"
)
AGAINST_TRAINING = "lira or rmia on 16 in-out models (--in-out 16) that have the same defense (--adaptive)"
AGAINST_PRIVACY = f"{AGAINST_TRAINING}, bounded by epsilon"
