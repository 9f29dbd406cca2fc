"""What to see in each picture and table of the two pages, in a sentence: titles and their captions."""

from __future__ import annotations

from stretto.page.frame import card

OF_ROOFLINES = (
    "Each dot is an op, larger where it takes longer. The dashed lines are the most that this machine can do: the "
    "further below them, the more there is to gain."
)
OF_OPS = "The longest coloured bars are the ops to look at first; grey is all the rest of the step."
OF_LAYERS = "What the ops of each layer take, without those of the layers inside it; grey is all the rest of the step."
CAPTIONS = {
    "Roofline, predicted": OF_ROOFLINES,
    "Roofline, measured": OF_ROOFLINES,
    "Predicted time by op": OF_OPS,
    "Predicted time by layer": OF_LAYERS,
    "Time by op": OF_OPS,
    "Time by layer": OF_LAYERS,
    "Work and traffic by plan": "What the layers compute (above) and move (below) as they run, and by the best equal "
    "formula.",
    "Scaling": "Where a line falls, more workers make the step faster; no exact way can be below the dashed ones.",
    "Communication by strategy": "What all workers together send in a step, with the most workers that were asked for: "
    "the shorter, the less the step waits for its links.",
    "Speed-up by site": "How many times as fast a layer or op is by what is advised: 1x is as fast as now.",
    "Speed-up by plan, over stock": "How many times as fast as stock each way of running a layer is; below 1x it is "
    "slower.",
    "Gain of the step": "What a step was predicted to save by the advice, and what it did save.",
    "Strategies, fastest first": "Ways to share the step among workers; ms is what it is predicted to take, speed-up "
    "is over one worker, bytes are those of all workers, memory is that of one.",
    "Layers": "What each layer computes and moves as it runs and by the best equal formula. Class: C weighs messages "
    "by constants, A by attention, MP by networks; L, P, R: linear, polynomial, rational in the adjacency matrix.",
    "Work and depth by layer": "Depth is the longest chain of steps that wait for one another; work over depth is how "
    "many processors could be busy.",
    "Graph": "What the cost of a step depends on besides the model.",
    "Memory": "What a step needs, part by part.",
    "Sparse and dense work": "How much of the step runs over edges.",
    "Partitions": "The graph in parts: halo rows are sent to other parts in every round; uneven is the largest part "
    "over the mean.",
    "Predicted, counted, measured": "What was predicted beside what was counted and timed here: a ratio of 1 is exact.",
    "Ops": "One row for each kind of call. Bound: what takes most of its time by the machine's usual rates.",
    "Replay with real and shuffled indices": "Ops run again outside the model. A ratio near 1: the op itself takes the "
    "time. The shuffled ratio is what a benchmark with random indices would have told.",
}


def told(title: str, body: str) -> str:
    """A titled box that begins with what is to be seen in it."""
    return card(title, body, CAPTIONS[title])
