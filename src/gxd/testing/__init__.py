"""Does a method of your own keep what all others promise?

::

    gxd.testing.check_method("mine", strength=0.5)

trains a small network some sixty times, which takes a few seconds, and raises :class:`ContractError` with the law that
is broken and where. A case per law in your own tests::

    @pytest.mark.parametrize("law", gxd.testing.LAWS, ids=lambda law: law.__name__)
    def test_my_method(law):
        law(gxd.testing.case_of("mine", strength=0.5))

The library tests all its own methods by the same laws (:mod:`gxd.testing.laws`).
"""

from gxd.testing.case import Case, case_of
from gxd.testing.laws import LAWS, ContractError, check_method

__all__ = ["LAWS", "Case", "ContractError", "case_of", "check_method"]
