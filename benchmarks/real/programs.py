"""Training programs from public repositories, and how to run each in a minute on data that it brings with it."""

from __future__ import annotations

from dataclasses import dataclass, field

ZERO_TO_ALL = "hunkim/PyTorchZeroToAll", "e5a260f"
TUTORIAL = "MorvanZhou/PyTorch-Tutorial", "dbe154a"
FLOWS = "kamenbliznashki/normalizing_flows", "97a73a0"
LECTURE = "karpathy/ng-video-lecture", "5220142"
NLP = "graykode/nlp-tutorial", "d05e31e"
EXAMPLES = "jcjohnson/pytorch-examples", "0003fcd"
ODE = "rtqichen/torchdiffeq", "657943a"


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        source: the repository on GitHub, and the commit.
        script: the file, or `-m` and the module, with its arguments.
        patches: texts that are replaced in the script, such as its number of epochs.
        folder: where it is started; "" for the repository.
    """

    source: tuple[str, str]
    script: str
    patches: dict[str, str] = field(default_factory=dict)
    folder: str = ""

    @property
    def name(self) -> str:
        return f"{self.source[0].partition('/')[2]}/{self.script.removeprefix('-m ').split()[0]}"


PROGRAMS = [
    Program(ZERO_TO_ALL, "07_diabets_logistic.py"),
    Program(ZERO_TO_ALL, "08_2_dataset_loade_logistic.py", {"num_workers=2": "num_workers=1"}),
    Program(
        ZERO_TO_ALL, "13_2_rnn_classification.py", {"N_EPOCHS = 100": "N_EPOCHS = 1", "loss.data[0]": "loss.item()"}
    ),
    Program(TUTORIAL, "301_regression.py", {"plt.pause(0.1)": ""}, "tutorial-contents"),
    Program(TUTORIAL, "306_optimizer.py", {"num_workers=2": "num_workers=0"}, "tutorial-contents"),
    Program(TUTORIAL, "406_GAN.py", {"range(10000)": "range(1500)", "plt.pause(0.01)": ""}, "tutorial-contents"),
    Program(TUTORIAL, "406_conditional_GAN.py", {"range(10000)": "range(1500)"}, "tutorial-contents"),
    Program(FLOWS, "planar_flow.py --train --target_potential u_z1 --n_steps 2000 --flow_length 8 --no_cuda"),
    Program(LECTURE, "bigram.py", {"max_iters = 3000": "max_iters = 1000", "eval_iters = 200": "eval_iters = 20"}),
    Program(
        LECTURE,
        "gpt.py",
        {
            "n_embd = 384": "n_embd = 48",
            "block_size = 256": "block_size = 32",
            "max_iters = 5000": "max_iters = 300",
            "eval_interval = 500": "eval_interval = 100",
            "eval_iters = 200": "eval_iters = 10",
            "n_layer = 6": "n_layer = 2",
            "max_new_tokens=500": "max_new_tokens=20",
        },
    ),
    Program(ODE, "-m examples.ode_demo --niters 60 --data_size 200 --method dopri5"),
    Program(ODE, "-m examples.latent_ode --niters 20"),
    Program(NLP, "NNLM.py", {"range(5000)": "range(600)"}, "1-1.NNLM"),
    Program(NLP, "TextCNN.py", {"range(5000)": "range(400)"}, "2-1.TextCNN"),
    Program(NLP, "TextLSTM.py", {"range(1000)": "range(400)"}, "3-2.TextLSTM"),
    Program(NLP, "Bi-LSTM.py", {"range(10000)": "range(200)"}, "3-3.Bi-LSTM"),
    Program(NLP, "Seq2Seq.py", {"range(5000)": "range(300)"}, "4-1.Seq2Seq"),
    Program(NLP, "Transformer.py", {}, "5-1.Transformer"),
    Program(NLP, "BERT.py", {"range(100)": "range(20)"}, "5-2.BERT"),
    Program(EXAMPLES, "nn/two_layer_net_optim.py"),
    Program(("tanelp/tiny-diffusion", "726b6bb"), "ddpm.py --num_epochs 4 --save_images_step 2"),
    Program(("spro/char-rnn.pytorch", "282bcb6"), "train.py README.md --n_epochs 20 --chunk_len 50 --batch_size 10"),
]
