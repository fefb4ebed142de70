"""Statistics of a core: plain numbers for metrics and the console."""

from __future__ import annotations

from actors.scheduling.core import Core


def statistics(core: Core) -> dict[str, float]:
    """Counts and gauges by name; those of the second tier only if there is one."""
    requests, running = core.requests, core.requests.running
    return {
        "num_waiting": requests.num_waiting,
        "num_waiting_tokens": requests.num_waiting_tokens,
        "num_decoding": len(requests.decoding),
        "num_prefilling": len(requests.prefilling),
        "num_finishing": len(running.finishing),
        "num_in_flight": len(core.in_flight),
        "num_steps": core.num_steps,
        "num_forced_steps": core.num_forced_steps,
        "num_blocks": core.config.num_blocks,
        "num_free_blocks": running.block_manager.num_free,
        "num_cached_blocks": running.block_manager.num_cached,
        "num_evictions": running.block_manager.num_evictions,
        "num_preemptions": requests.num_preemptions,
        "num_swaps": running.swap.num_swaps,
        "num_free_host_blocks": running.swap.host.num_free,
        "num_drafts": core.speculation.num_drafts,
        "num_accepted_drafts": core.outcomes.num_accepted_drafts,
        # A mean over steps, which stays as it was while none is run.
        "tokens_per_s": 0.0 if core.is_idle else requests.tokens_per_s,
        **({} if core.tier is None else core.tier.statistics()),
    }
