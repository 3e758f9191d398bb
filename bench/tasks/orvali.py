"""Orvali, an invented language of about 300 words: its dictionary and its grammar beside English.

Word order: time, subject, object, place, `not`, verb, question word. No articles. Adjectives follow nouns,
possessives and numerals precede them. Plural: noun + `li`. Past: verb + `ta`. Prepositions follow their noun.
Entries are `english=orvali`; irregular English plurals and all English past forms follow a colon.
"""

from __future__ import annotations

import random

PLURAL, PAST = "li", "ta"


def _table(text: str) -> dict[str, str]:
    return dict(entry.split("=") for entry in text.split())


PRONOUNS = _table(
    """
    I=gis you=nen he=mu she=vam we=za they=bi
    """
)
FUNCTION = _table(
    """
    and=ge not=sim be=lo question=fe
    """
)
POSSESSIVES = _table(
    """
    my=dubi your=kusri his=fezas her=siso our=ferso their=lolul
    """
)
NUMERALS = _table(
    """
    two=daku three=gafi four=bikil five=lemu six=dinis seven=rebir many=lira
    """
)
PREPOSITIONS = _table(
    """
    in=godar on=repo under=lamko near=gosmos behind=neme before=bagur with=minlum without=madom
    """
)
TIMES = _table(
    """
    today=fini yesterday=pesi now=molsem often=fibe sometimes=numon later=geldo tonight=vopa outside=gelu
    """
)
NOUNS = _table(
    """
    king=pontum queen=renvuki man:men=povi woman:women=zonri child:children=zorsi friend=durfe
    mother=kubeldum father=dulle brother=sarinu sister=vonomlin teacher=sulgu farmer=dafi doctor=kapa
    sailor=dessudas baker=tezi hunter=rete singer=luno soldier=rimumdo stranger=ludiso neighbour=ferbe
    dog=rupir cat=delda horse=siseso bird=tatape wolf:wolves=zidol bear=pile fox:foxes=bibi
    mouse:mice=fazam cow=tusto goat=pusri snake=muze frog=sunide fly:flies=sapolan eagle=pube owl=redu
    house=parribar door=giko window=fodu wall=tito roof=noki room=sore table=boke chair=vete bed=gosim
    lamp=fandiru box:boxes=detave key=ritu book=febasa letter=sorve picture=valgim map=ripagim
    bottle=balpo cup=vosrobo plate=tolku knife:knives=nepamgu spoon=sagun bowl=rilpil rope=zurilur
    boat=zezam ship=fefu wagon=labur wheel=bizis sword=pakol bell=zissa drum=birzen flute=bapuda ring=fepa
    crown=mevu coat=kedu hat=belpo shoe=vepom tree=nuru flower=ruto leaf:leaves=fizi apple=rize
    pear=vigeka nut=burlo root=todi garden=borma field=luseldo forest=rodos river=ganfe lake=vosi sea=talo
    island=totirus mountain=lurre hill=pino valley=nami road=kelfi bridge=sovemo village=vaso
    city:cities=funnu market=zefi castle=rebantem tower=renze temple=rela school=bibor shop=toza farm=zomu
    mill=dersopo well=rolkus gate=litar sun=fofegu moon=dimna star=kega cloud=kuba storm=foti stone=zofe
    fire=genu song=zimo story:stories=tanidi word=ramfobir name=feso dream=mebum secret=vanto game=lora
    prize=nove gift=nuvurfi day=vembi night=vakon winter=miza summer=tonzi egg=lafo cake=guszu
    loaf:loaves=donure fruit=fika basket=suku candle=pola mirror=lulem hammer=dimo nail=fugo needle=teko
    feather=dodi shell=lotem coin=letim
    """
)
VERBS = _table(
    """
    see:saw=popu find:found=tize love:loved=nurgosfur hate:hated=velegi carry:carried=zamketi
    bring:brought=fuldar take:took=zalfa buy:bought=sifa sell:sold=risinpo make:made=zuti build:built=pusa
    break:broke=nuto open:opened=gumku close:closed=kegu paint:painted=gogu clean:cleaned=foge
    wash:washed=telfinvu draw:drew=zanimes watch:watched=vuki hear:heard=negorre follow:followed=rivo
    lead:led=rirde hold:held=favir hide:hid=vummibi lose:lost=zome keep:kept=rubini need:needed=tosi
    want:wanted=latu know:knew=vafa remember:remembered=leme forget:forgot=zemar fear:feared=gilrofa
    help:helped=dusdel visit:visited=tefu call:called=nume thank:thanked=ronurvi teach:taught=nunva
    catch:caught=vuvus eat:ate=pesopir guard:guarded=vorga move:moved=tikas steal:stole=bavosu
    throw:threw=revo pull:pulled=rumo push:pushed=mede choose:chose=sisbu praise:praised=pozero
    """
)
INTRANSITIVE = _table(
    """
    sleep:slept=vapen sing:sang=lissa dance:danced=kopo work:worked=bemge wait:waited=digumpe
    laugh:laughed=barra cry:cried=lemi run:ran=nofosar walk:walked=zimven swim:swam=seki stay:stayed=pufor
    live:lived=tivavo fall:fell=valerra rest:rested=biko play:played=mulges stand:stood=ponom
    """
)
ADJECTIVES = _table(
    """
    old=kadom young=fazilul big=kika small=peme good=rifol bad=gabo new=pikal red=zutu blue=felo
    green=remos white=pofufon black=defu yellow=kelul brown=raful long=tepe short=rurvi high=mater
    deep=lomki wide=sorse narrow=biza strong=tegan weak=nipo brave=lalka clever=kino quiet=zolne
    loud=gokem happy=molri sad=torulo poor=bondo rich=poti kind=kanda cold=demu warm=geve dark=furpe
    bright=kagu heavy=vodom light=dupusso clean=mamne dirty=teva empty=kirambi full=fafuntu broken=duman
    golden=gula silver=sose wooden=tatum sweet=pife round=bubor strange=bebun hungry=kefabu tired=deze
    """
)
NAMES = ("Mira", "Tomas", "Lena", "Oskar", "Nadia", "Bruno")


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def _third(verb: str) -> str:
    """`verb` after he, she or it."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "x", "ch", "sh")) else "s")


# English singular, English plural, Orvali stem.
_NOUNS = [
    (one, many or _plural(one), orvali)
    for one, _, many, orvali in ((*entry.partition(":"), orvali) for entry, orvali in NOUNS.items())
]
# English base, third person, past, Orvali stem.
_TRANSITIVE, _INTRANSITIVE = (
    [
        (base, _third(base), past, orvali)
        for base, _, past, orvali in ((*entry.partition(":"), orvali) for entry, orvali in table.items())
    ]
    for table in (VERBS, INTRANSITIVE)
)
_BEINGS = _NOUNS[:33]  # people and animals: the subjects of most sentences
_ADJECTIVES, _POSSESSIVES, _NUMERALS = (list(t.items()) for t in (ADJECTIVES, POSSESSIVES, NUMERALS))
_PRONOUNS, _PREPOSITIONS, _TIMES = (list(t.items()) for t in (PRONOUNS, PREPOSITIONS, TIMES))
_AND, _NOT, _BE, _QUESTION = FUNCTION.values()


def _noun_phrase(rng: random.Random, nouns: list[tuple[str, str, str]]) -> tuple[str, str, bool]:
    """English, Orvali, and whether it is plural."""
    one, many, stem = rng.choice(nouns)
    plural = rng.random() < 0.3
    draw = rng.random()
    if draw < 0.65:
        english, orvali = "the ", ""
    elif draw < 0.85:
        possessive = rng.choice(_POSSESSIVES)
        english, orvali = possessive[0] + " ", possessive[1] + " "
    else:
        plural = True
        numeral = rng.choice(_NUMERALS)
        english, orvali = numeral[0] + " ", numeral[1] + " "
    orvali += stem + PLURAL if plural else stem
    if rng.random() < 0.35:
        adjective = rng.choice(_ADJECTIVES)
        english += adjective[0] + " "
        orvali += " " + adjective[1]
    return english + (many if plural else one), orvali, plural


def _subject(rng: random.Random) -> tuple[str, str, str]:
    """English, Orvali, and which form of `be` it takes: am, is or are."""
    draw = rng.random()
    if draw < 0.2:
        english, orvali = rng.choice(_PRONOUNS)
        return english, orvali, {"I": "am", "he": "is", "she": "is"}.get(english, "are")
    if draw < 0.3:
        name = rng.choice(NAMES)
        return name, name, "is"
    english, orvali, plural = _noun_phrase(rng, _BEINGS if rng.random() < 0.85 else _NOUNS)
    if draw > 0.93:
        other, second, _ = _noun_phrase(rng, _BEINGS)
        return f"{english} and {other}", f"{orvali} {_AND} {second}", "are"
    return english, orvali, "are" if plural else "is"


def sentence(rng: random.Random) -> tuple[str, str]:
    """One sentence in English and in Orvali; either determines the other."""
    subject, orvali, be = _subject(rng)
    past, negated, asked = rng.random() < 0.45, rng.random() < 0.12, rng.random() < 0.1
    time = rng.choice(_TIMES) if not asked and rng.random() < 0.2 else None
    if time:
        past = time[0] == "yesterday" or (past and time[0] != "now")

    kind = rng.random()
    if kind < 0.18:  # something is somehow
        rest, stem = rng.choice(_ADJECTIVES)
        orvali += " " + stem
        verb, form = "", _BE
        helper = ("were" if be == "are" else "was") if past else be
    else:
        transitive = kind < 0.75
        base, third, past_form, form = rng.choice(_TRANSITIVE if transitive else _INTRANSITIVE)
        rest = ""
        if transitive:
            rest, objects, _ = _noun_phrase(rng, _NOUNS)
            orvali += " " + objects
        if rng.random() < (0.25 if transitive else 0.7):
            where, postposition = rng.choice(_PREPOSITIONS)
            english, place, _ = _noun_phrase(rng, _NOUNS)
            rest += f" {where} {english}"
            orvali += f" {place} {postposition}"
        helper = "did" if past else "does" if be == "is" else "do"
        verb = past_form if past else third if be == "is" else base
        if negated or asked:
            verb = base
        else:
            helper = ""
    orvali += (f" {_NOT} " if negated else " ") + form + (PAST if past else "")
    if asked:
        orvali += " " + _QUESTION
        parts = (helper, subject, "not" if negated else "", verb, rest)
    else:
        parts = (subject, helper, "not" if negated else "", verb, rest)
    english = " ".join(part.strip() for part in parts if part)
    if time:
        english, orvali = f"{time[0]} {english}", f"{time[1]} {orvali}"
    mark = "?" if asked else "."
    return english[0].upper() + english[1:] + mark, orvali[0].upper() + orvali[1:] + mark
