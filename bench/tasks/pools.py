"""Names and words that tasks draw from."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """The words of a table."""
    return tuple(text.split())


NAMES = words("""
    Ann Bob Cara Dan Eva Finn Gina Hugo Iris Jack Kate Leo Mia Nils Olga Paul Rosa Sam Tina Uwe Vera
    Will Yara Zoe Adam Bella Carl Dora Emil Fred Greta Hans Ida Jonas Karin Lars Maya Noah Otto Petra
    Ralf Sara Tom Ulla Victor Wanda
""")
SURNAMES = words("""
    Brown Clark Davis Evans Fisher Green Harris Jones Keller Lewis Miller Novak Olsen Parker Reed Smith
    Turner Underwood Vogel Walker Young Baker Cooper Hill King Moore Stone Wood
""")
CITIES = words("""
    Oslo Rome Lima Paris Berlin Madrid Vienna Dublin Prague Athens Warsaw Lisbon Cairo Tokyo Delhi
    Boston Denver Geneva Helsinki Nairobi Quito Riga Sofia Tallinn Turin Utrecht Zurich Bergen
""")
COLOURS = words("""
    red blue green black white yellow brown grey orange purple pink silver
""")
FRUITS = words("""
    apple pear plum peach lemon cherry melon grape fig lime mango banana
""")
WORDS = words("""
    anchor apple arrow autumn badge basket beach bell bird blanket boat book bottle branch bread bridge
    brush bucket butter button cabin cable candle carpet castle chair cheese circle cloud coffee copper
    corner cotton cousin cradle crown curtain desert dinner doctor dragon drawer dream eagle earth echo
    engine evening fabric farmer feather fence field finger flame flower forest fountain friend frost
    garden gate glass glove grain guitar hammer harbor hat hill honey horse hotel house ice island ivory
    jacket jar jewel journey juice jungle kettle key kitchen kite knife ladder lake lamp leaf lemon
    letter library light lion lizard machine magnet map market meadow metal mirror monkey moon morning
    mountain mouse museum music needle nest night north notebook number oak ocean office olive onion
    orange orchard oven owl paint palace paper park pencil pepper piano picture pillow planet pocket
    pond potato prince puzzle queen quilt rabbit radio rain ribbon ring river road rocket roof rope rose
    sail salt sand school season shadow sheep ship shoe silver sister sky snow soap song spoon spring
    square stair star station stone storm story street sugar summer sun table teacher temple thread
    thunder ticket tiger tower train tree tunnel turtle uncle valley vase village violin voice wagon
    wall water wave wheel whistle wind window winter wolf wood yard yellow zebra
""")
