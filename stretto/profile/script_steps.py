"""The steps of a script that runs as it is: where one ends, which models it calls, and with what.

Steps are told apart by the optimizer; where several step in turn, a round of them is one step (rounds.py). In a script
that makes none, a step goes from one call of its first model to the next: inference, or training by hand.
"""

from __future__ import annotations

import copy
import runpy
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_geometric.nn import MessagePassing

from stretto.graph import Graph
from stretto.machine.timing import waiter
from stretto.observe.trace import Recorder
from stretto.observe.workload import Workload
from stretto.profile.call_site import Site, backward, indices, learned
from stretto.profile.captured import operands
from stretto.profile.rounds import Rounds, Signature
from stretto.profile.surroundings import imported_beside, process_kept

WARMUP = 3


class Enough(BaseException):
    """Ends the script; not an Exception, so that no handler of the script's own catches it."""


class Watched(Workload):
    """What a script's step asks of its models, without the loss, the optimizer and all else around it."""

    def __init__(self, model: nn.Module, calls: list[Site]) -> None:
        super().__init__(model, None, "train" if any(call.grads for call in calls) else "infer")
        self.calls = calls

    def copied(self) -> Watched:
        model = copy.deepcopy(self.model)
        copies = {id(one): other for one, other in zip(self.model.modules(), model.modules(), strict=True)}
        return Watched(model, [call._replace(module=copies[id(call.module)]) for call in self.calls])

    def run(self, recorder: Recorder | None = None) -> None:
        """The calls, then the gradients of all of them from those that their outputs had in the script."""
        self.model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.mode == "train"):
            outs = self._forward()
        if recorder is not None and self.mode == "train":
            recorder.phase = "backward"
        if self.mode == "train":
            backward([end for call, out in zip(self.calls, outs, strict=True) for end in call.gradients(out)])
            if recorder is not None:
                recorder.backward_ended()

    def _forward(self) -> Any:
        return [call.called() for call in self.calls]


class Roots(nn.Module):
    """The models that a script calls, each by the name of its class: what gives their layers a path."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        for module in modules:
            name = type(module).__name__
            number = sum(known.split(" ")[0] == name for known in self._modules)
            self.add_module(f"{name} {number + 1}" if number else name, module)


def _worth_naming(module: nn.Module) -> bool:
    """Whether it is a model: a loss has no parameters."""
    return any(isinstance(m, MessagePassing) for m in module.modules()) or any(True for _ in module.parameters())


def _other_graph(site: Site, args: Any, kwargs: Any) -> bool:
    """Whether a call has other edges than the site's, which no loader has sorted before."""
    before, now = indices(site.args, site.kwargs), indices(args, kwargs)
    same = len(before) == len(now) and all(a is b or torch.equal(a, b) for a, b in zip(before, now, strict=True))
    rows = {t.size(0) for t in operands((args, kwargs)) if t.is_floating_point() and t.dim()}
    return not same and not all(any(Graph.is_known(i, (n, n)) for n in rows) for i in now)


class Hook:
    """A hook of ours on a user's module. A copy of the module, in memory or in a file, has one of Python's own in its
    place, which does nothing: it holds nothing of what we have seen, and needs nothing of ours to be loaded."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Steps:
    """Watches a script step by step: a few to warm up, in which its models are met, then as a subclass wants.

    known: optimizers of a run before, whose rounds are the steps. imported: modules that it had from its own folder.
    """

    def __init__(self, known: tuple[Signature, ...] = (), imported: frozenset[str] = frozenset()) -> None:
        self.steps = 0
        self.imported = imported
        self.rounds = Rounds(known)
        self.device = torch.device("cpu")
        self.by_optimizer = False  # one was made
        self.calls: list[Site] = []  # of the last step to warm up
        self._roots: list[nn.Module] = []
        self._layers: dict[int, Site] = {}  # by id of the layer
        self._evaluations: dict[int, Site] = {}  # by id of the layer, of calls without gradients
        self._evaluated: set[int] = set()  # layers that were called without gradients only
        self._layer_calls: Counter[int] = Counter()  # of all steps to warm up but the first, by id of the layer
        self._layer_learned: Counter[int] = Counter()  # those of them that a gradient came back to
        self._hooks: list[Any] = []
        self._new_graphs: set[int] = set()  # layers that have got another one each time, by id
        self._holders: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._marks: list[Any] = [register_module_module_registration_hook(self._held)]
        self._depth = 0
        self._met: set[int] = set()
        self._start = 0.0
        self._busy = False
        self._hook()

    @property
    def model(self) -> nn.Module:
        """All that the script calls: its one model, or several under their names. Layers that it calls one by one, by
        an `encode` of the model that holds them, are that model's."""
        result = list({id(saved): saved for saved in map(self._outermost, self._roots)}.values())
        if len(result) == 1 and not isinstance(result[0], MessagePassing):
            return result[0]
        return Roots(result)

    def _held(self, holder: nn.Module, name: str, module: nn.Module | None) -> None:
        """A module is being put into another one."""
        if module is not None:
            self._holders[module] = weakref.ref(holder)

    def _outermost(self, module: nn.Module) -> nn.Module:
        reference = self._holders.get(module)
        holder = None if reference is None else reference()
        if holder is None or all(child is not module for child in holder.children()):
            return module
        return self._outermost(holder)

    @property
    def sites(self) -> dict[str, Site]:
        """The message-passing layers by path, each with the arguments of one call and how many a step has, with and
        without gradients. Where nothing learns, all calls are alike."""
        names = {id(module): path for path, module in self.model.named_modules()}
        result: dict[str, Site] = {}
        for key, site in self._layers.items():
            calls = self._layer_calls[key] / WARMUP
            learned = self._layer_learned[key] / WARMUP if self._layer_learned else calls
            if key in names and calls:
                result[names[key]] = site._replace(
                    calls=learned,
                    forward=max(0.0, calls - learned),
                    new_graph=key in self._new_graphs,
                    evaluation=self._evaluations.get(key),
                )
        return result

    @property
    def workload(self) -> Watched | None:
        """What the step asks of its models; None where it calls none."""
        asked = [call for call in self.calls if call.grads] or self.calls
        return Watched(self.model, asked) if asked else None

    # ---- models and layers, while the script warms up ----

    def _hook(self) -> None:
        self._hooks.append(register_module_forward_pre_hook(self._enter))
        self._hooks.append(register_module_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0 and id(module) not in self._met and _worth_naming(module):
            self._roots.append(module)
            if len(self._roots) == 1:  # the first of its hooks: a call belongs to the step that it begins
                self._marks.append(module.register_forward_pre_hook(Hook(self._first_model)))
                self._begin()
            self._hooks.append(module.register_forward_pre_hook(Hook(self._called), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(Hook(self._answered)))
        if isinstance(module, MessagePassing):
            self._layer_calls[id(module)] += 1  # here, since a hook of the module itself would miss its first call
        if isinstance(module, MessagePassing) and id(module) not in self._met:
            self._hooks.append(module.register_forward_pre_hook(Hook(self._layer), with_kwargs=True))
        self._met.add(id(module))
        self._depth += 1

    def _learns(self) -> bool:
        """A step of training may evaluate in between."""
        return torch.is_grad_enabled() or not self.by_optimizer

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._depth = max(0, self._depth - 1)
        ends = learned(out) if isinstance(module, MessagePassing) else []
        if ends and self.steps <= WARMUP and id(module) in self._layers:
            self._layers[id(module)].answered(out)
        if ends:
            ends[0].register_hook(lambda _: self._layer_learned.update([id(module)]))

    # kwargs: a hook that is removed during a call is still called, without them.

    def _layer(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self.steps > WARMUP:
            return
        key, learns = id(module), self._learns()
        if not learns:
            last = self._evaluations.get(key) or Site.of(module, args, kwargs)
            self._evaluations[key] = last._replace(changing=last.others(args, kwargs))
        known = self._layers.get(key)
        if known is None or (learns and key in self._evaluated):
            self._layers[key] = Site.of(module, args, kwargs)
            (self._evaluated.discard if learns else self._evaluated.add)(key)
            self._new_graphs.discard(key)  # what evaluations were called with says nothing of training
        elif learns or key in self._evaluated:
            self._layers[key] = known._replace(changing=known.others(args, kwargs))
            if _other_graph(known, args, kwargs):
                self._new_graphs.add(key)

    def _called(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self.steps <= WARMUP and self._depth == 1:
            self.calls.append(Site.of(module, args, kwargs))

    def _answered(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.steps <= WARMUP and self.calls and self.calls[-1].module is module:
            self.calls[-1].answered(out)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---- where a step ends ----

    def made(self) -> None:
        """The script has made an optimizer: its steps are the steps, unless calls are being timed already."""
        if not self.by_optimizer and self.steps <= WARMUP:
            self.by_optimizer, self.steps = True, 0

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The optimizer is about to step."""
        self.device = next((p.device for group in optimizer.param_groups for p in group["params"]), self.device)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        if not self.by_optimizer:
            return
        what = self.rounds.stepped(optimizer)
        if what == "ends":
            self._end()
        elif what == "anew":
            self.restart()

    def restart(self) -> None:
        """A step is something else from here on; what was seen of those before is of no use."""
        self._unhook()
        self._roots, self._layers, self._evaluations, self.calls = [], {}, {}, []
        self._new_graphs, self._evaluated, self._met = set(), set(), set()
        self.steps = self._depth = 0
        self._hook()
        self._begin()

    def _first_model(self, module: nn.Module, args: Any) -> None:
        if not self.by_optimizer and not self._busy:
            self.device = next((p.device for p in module.parameters()), self.device)
            self._end()

    def _begin(self) -> None:
        self._start = time.perf_counter()

    def _end(self) -> None:
        wait = waiter(self.device)
        if wait is not None:
            wait()
        self.ended(time.perf_counter() - self._start)
        self.steps += 1
        if self.steps == 1:  # what an evaluation calls between two steps is of the second
            self._layer_calls.clear()
            self._layer_learned.clear()
        if self.steps <= WARMUP:
            self.calls = []
        else:
            self._unhook()
            self._busy = True  # a subclass may call the models itself
            self.begins()
            self._busy = False
        self._begin()

    def ended(self, seconds: float) -> None:
        """A step has taken so long."""

    def begins(self) -> None:
        """A step begins, after those that warm up. Raises Enough where no more are wanted."""

    def close(self) -> None:
        """The script is over."""
        self._unhook()
        for mark in self._marks:
            mark.remove()
        self._marks.clear()

    @property
    def unit(self) -> str:
        """What its steps are counted in."""
        several = len(self.rounds.kinds)
        if several > 1:
            return f"rounds of its {several} optimizers"
        return "optimizer steps" if self.by_optimizer else "calls of its model"


@contextmanager
def _watching(steps: Steps) -> Iterator[None]:
    optimizers: Any = torch.optim.Optimizer
    plain = optimizers.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        steps.made()
        plain(self, *args, **kwargs)

    handles = (register_optimizer_step_pre_hook(steps.before), register_optimizer_step_post_hook(steps.after))
    optimizers.__init__ = made
    try:
        yield
    finally:
        optimizers.__init__ = plain
        steps.close()
        for handle in handles:
            handle.remove()


def run(script: str, arguments: list[str], steps: Steps) -> None:
    """Run the script under watch until it ends, or enough is known; what an earlier run had from its folder is imported
    anew."""
    for name in steps.imported:
        sys.modules.pop(name, None)
    known = set(sys.modules)
    try:
        with process_kept(), _watching(steps), warnings.catch_warnings():
            sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
            warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")  # ours
            runpy.run_path(script, run_name="__main__")
    except Enough:
        pass  # all that was wanted has been seen
    except SystemExit as ended:
        if ended.code:  # the script's own word for a failure; without one it is over, as at its last line
            raise
    finally:
        steps.imported = imported_beside(script, known)
