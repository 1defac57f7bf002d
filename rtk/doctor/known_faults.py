"""Known faults of routed-experts capture, by product and version: data, and how to look it up.

Ranges were read out of the published packages: `since` is the first release that has the faulty code, and `before`
the first that does not. What could not be established that way is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

from rtk.client.servers.versions import numbers


@dataclass(frozen=True)
class KnownFault:
    """A fault that some versions of a server have.

    Attributes:
        product: "vLLM" or "SGLang".
        since: the first version with it.
        before: the first version without it; None where no release is known to be free of it.
        reference: the public report.
        when: under what circumstances it strikes.
        looks_like: what comes back.
        remedy: what to do.
        symptom: the doctor's check that it makes fail; None where none can see it.
    """

    product: str
    since: str
    before: str | None
    reference: str
    when: str
    looks_like: str
    remedy: str
    symptom: str | None

    def touches(self, product: str, version: str) -> bool:
        """Whether that version has the fault. A version that is no number, such as a nightly's, never does."""
        found = numbers(version)
        return (
            product == self.product
            and bool(found)
            and numbers(self.since) <= found
            and (self.before is None or found < numbers(self.before))
        )


def of(product: str, version: str) -> list[KnownFault]:
    """The faults of one version of a server."""
    return [fault for fault in KNOWN_FAULTS if fault.touches(product, version)]


KNOWN_FAULTS = (
    KnownFault(
        product="vLLM",
        since="0.14",
        before="0.16",
        reference="vllm #33013",
        when="always; the capture is bound after the layers were built, and after EPLB has renamed the experts",
        looks_like="all zeros, or with EPLB physical expert ids",
        remedy="update to 0.22 or newer",
        symptom="not all zero",
    ),
    KnownFault(
        product="vLLM",
        since="0.14",
        before="0.18",
        reference="vllm #35744",
        when="hybrid models (Mamba or linear attention beside attention)",
        looks_like="an IndexError in the server, or routes taken from the slots of the wrong KV cache group",
        remedy="update to 0.22 or newer",
        symptom="prompt rows",
    ),
    KnownFault(
        product="vLLM",
        since="0.14",
        before="0.21",
        reference="vllm #28284",
        when="over HTTP; these releases give routes to Python callers only",
        looks_like="no routed_experts in any answer, whatever the flags",
        remedy="update to 0.22 or newer",
        symptom="routes",
    ),
    KnownFault(
        product="vLLM",
        since="0.21",
        before="0.22",
        reference="vllm #38939",
        when="always",
        looks_like="routes on the OpenAI routes only, split into prompt_routed_experts and routed_experts",
        remedy="update to 0.22 or newer, which sends one array and serves it on /inference/v1/generate too",
        symptom="routes",
    ),
    KnownFault(
        product="vLLM",
        since="0.22",
        before="0.27",
        reference="vllm #44116, #54730",
        when="MoE layers on a monolithic FlashInfer kernel, the default on Blackwell",
        looks_like="right shape, all zeros in MoE layers; the text is right",
        remedy="update to 0.27 or newer, or start with --moe-backend triton",
        symptom="not all zero",
    ),
    KnownFault(
        product="vLLM",
        since="0.22",
        before="0.31",
        reference="vllm #37094",
        when="streams on a busy server: the last pieces are merged when nobody has fetched them yet",
        looks_like="a stream whose last event has no routes, now and then",
        remedy="ask without streaming where routes must come, or update to 0.31 or newer",
        symptom="streaming",
    ),
    KnownFault(
        product="SGLang",
        since="0.5.8",
        before="0.5.12",
        reference="strands-sglang #72, sglang #24851",
        when="a request sets routed_experts_start_len, which these releases accept and do not read",
        looks_like="every turn sends the rows of the whole conversation",
        remedy="update to 0.5.12 or newer, or cut the rows by their count",
        symptom="start offset",
    ),
    KnownFault(
        product="SGLang",
        since="0.5.11",
        before=None,
        reference="sglang #36404",
        when="padded batches, from a chunked-prefill boundary on; capture comes before the padding is masked",
        looks_like="one stale row repeated over contiguous tokens of long prompts",
        remedy="compare long prompts with --chunked-prefill-size -1, and read in the release notes whether #36404 is in",
        symptom="no stuck rows",
    ),
)
