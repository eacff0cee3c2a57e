"""What a slice of a model costs, by arithmetic on one run of the whole: hundreds of candidates are compared by it.

A layer multiplies each of its weights as often as before, so its multiply-accumulates are in proportion to its weights;
the two products of an attention are in proportion to the channels of q and k, and of v.
"""

from collections.abc import Callable
from math import prod

from torch import nn

from vitcompress import cost
from vitcompress.cost import Cost
from vitcompress.families import family_of
from vitcompress.plan import Plan
from vitcompress.planned_sizes import sliced


def planned_cost(model: nn.Module, input_size: tuple[int, int, int]) -> Callable[[Plan], Cost] | None:
    """The function that says what `model` costs once sliced by a plan that removes nothing, as `cost.measure` would.

    None where that cannot be told from the whole: multiply-accumulates outside of layers and attentions, and heads
    that are padded.
    """
    family = family_of(model)
    spaces = [space for space in family.spaces(model) if space.attention]
    before = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parameters = [name for name, _ in model.named_parameters()]
    parts = cost.by_module(model, input_size)
    whole = parts[""]
    layers = {f"{path}.weight": part.macs_linear for path, part in parts.items() if f"{path}.weight" in before}
    products = {name: parts[name].macs - parts[name].macs_linear for name in {s.attention for s in spaces}}
    told = (sum(layers.values()), sum(products.values())) == (whole.macs_linear, whole.macs - whole.macs_linear)
    if not told or any(getattr(module, "padded", False) for module in model.modules()):
        return None
    widths = {name: sum(space.size for space in spaces if space.attention == name) for name in products}

    def found(plan: Plan) -> Cost:
        after = sliced(before, model, family, plan)
        linear = sum(macs * prod(after[name]) // prod(before[name]) for name, macs in layers.items())
        left = dict.fromkeys(products, 0)
        for space in spaces:
            left[space.attention] += len(plan.kept.get(space.name, range(space.size)))
        inside = sum(macs * left[name] // widths[name] for name, macs in products.items())
        return Cost(sum(prod(after[name]) for name in parameters), linear + inside, linear)

    return found
