"""A watch of an inversion attack that shows and saves nothing."""


class Silent:
    """Observer of an attack in a test."""

    def advance(self, iterations):
        pass

    def load(self):
        return None

    def save(self, state, pictures):
        pass
