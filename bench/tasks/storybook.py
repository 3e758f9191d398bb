"""The words and sentences that stories are made of.

Slots: {N} the hero, {he} {He} {his} {His} {him} the hero's pronouns, {F} the friend, {fhe} its pronoun,
{o} the object ({an_o} with its article), {hero} {place} {spot} {weather} {food}; {kind} and {nature} of an
animal that helps.
Within one story no sentence may be able to occur twice: every sentence stands in one beat of the tables only.
"""

from __future__ import annotations

from bench.tasks.pools import words

SHE = words(
    """
    Ada Alma Anna Bella Clara Dora Elsa Emma Flora Greta Hanna Ida Ines Irma Julia Karla Lena Lina Lucy
    Mara Maria Mila Nadia Nora Olga Paula Petra Rosa Ruth Selma Sofia Tessa Vera Wilma Yara Zoe
    """
)
HE = words(
    """
    Adam Anton Ben Bruno Carl Conrad David Emil Erik Felix Frank Georg Hans Hugo Ivan Jakob Jonas Karim
    Leo Lukas Martin Milo Nico Nils Oscar Otto Pablo Paul Peter Rafael Samuel Simon Theo Tom Viktor Walter
    """
)
HEROES = [*SHE, *HE]
OBJECTS = words(
    """
    anchor apron arrow basket bell blanket book bottle box broom brush bucket button candle cap chain
    clock coat coin compass cup drum feather flag flute glove hammer hat horn jacket jar kettle key kite
    knife ladder lamp lantern letter map medal mirror needle paddle painting pencil pillow pipe plate pot
    purse ribbon ring rope saddle scarf shell shovel spoon stamp sword telescope ticket torch trumpet
    umbrella vase violin wheel whistle
    """
)
LAST = {
    "trait": words(
        "young old shy brave clever patient cheerful quiet kind poor curious careful proud friendly"
    ),
    "trade": words(
        """
        baker farmer painter teacher sailor gardener carpenter shepherd tailor miller doctor singer fisher
        writer cook student clockmaker postman librarian potter
        """
    ),
    "weather": words("sunny rainy windy cold warm misty cloudy grey bright frosty"),
    "food": (
        "soup",
        "fresh bread",
        "apple pie",
        "tea and cake",
        "hot porridge",
        "bread and cheese",
        "plum jam",
    ),
}
# Where, and a spot that belongs there.
PLACES = (
    ("in a village by the sea", "the harbour"),
    ("in a small town in the hills", "the market square"),
    ("on a green island", "the lighthouse"),
    ("at the edge of a great forest", "the old oak"),
    ("in a valley between two mountains", "the stone bridge"),
    ("near a wide river", "the ferry"),
    ("in a city with seven towers", "the clock tower"),
    ("on a lonely farm", "the barn"),
    ("in a village of windmills", "the tallest mill"),
    ("beside a quiet lake", "the boat house"),
    ("in the far north", "the frozen pond"),
    ("at the foot of a castle", "the castle gate"),
)
FRIENDS = (
    ("an old owl", "wise"),
    ("a little fox", "quick"),
    ("a grey cat", "silent"),
    ("a brown dog", "loyal"),
    ("a white goose", "loud"),
    ("a small mouse", "careful"),
    ("a black raven", "clever"),
    ("a tired donkey", "patient"),
    ("a young goat", "bold"),
    ("a red squirrel", "fast"),
)
CODE_WORDS = words(
    """
    ORCHID FALCON HARBOR COPPER MEADOW WINTER SILVER LEMON TIGER ROCKET MARBLE CEDAR AMBER COMET RAVEN
    LOTUS SUMMIT DELTA GARNET PEPPER VIOLET ANCHOR CANDLE TUNNEL
    """
)
CODE_SENTENCES = (
    "On a small piece of paper in {his} pocket stood the code {c}, and {he} kept it for ever.",
    "Before going to bed {he} wrote {c} into {his} diary, so that nobody would forget this day.",
    "Later {N} carved {c} into the door, and only {F} knew what it meant.",
    "Somebody had painted {c} on the wall, and {N} smiled when {he} read it.",
    "Under the {o} they found a note that said {c} and nothing else.",
    "From then on {c} was the secret sign of {N} and {F}.",
)
ENDINGS = (
    "And that night everyone slept well.",
    "Nobody ever forgot that day.",
    "Then the stars came out, one by one.",
    "And so the long day came to an end.",
    "The next morning the sun was shining again.",
    "After that, the door was never locked again.",
    "And they laughed about it for many years.",
    "From far away the bells were ringing.",
    "It was the best day of the whole year.",
    "And the old clock struck twelve.",
    "At last it was quiet in the house.",
    "That is how the two became friends.",
    "And the wind carried the song over the hills.",
    "Only the moon had seen it all.",
    "Since then a light burns there every night.",
    "And the soup tasted better than ever.",
)

# Beats that all plots share.
BEATS: dict[str, tuple[str, ...]] = {
    "open": (
        "Once upon a time {hero} named {N} lived {place}.",
        "{N} was {hero} who lived {place}.",
        "There was once {hero} {place}, and everybody called {him} {N}.",
        "Long ago, {place}, there lived {hero} named {N}.",
    ),
    "daily": (
        "Every morning {he} walked to {spot} and said hello to everyone.",
        "{He} got up early, worked hard and liked {food}.",
        "On {weather} days {he} sat at {spot} and watched the people go by.",
        "{He} did not have much, but {he} always shared {his} {food}.",
        "{His} best friend was {F}, who lived next door.",
    ),
    "worry": (
        "{N} did not know what to do.",
        "{He} sat down at {spot} and thought for a long time.",
        '"What shall I do now?" {he} asked.',
        "{He} felt sad, and even {food} could not cheer {him} up.",
        "For a whole day {he} could think of nothing else.",
    ),
    "help": (
        'Then {F} came by. "Let us try it together," {fhe} said.',
        '{F} heard about it and came at once. "I will help you," {fhe} said.',
        "Luckily, {F} was not far away and offered to help.",
        "Just then {kind} appeared. It was very {nature} and seemed to know the answer.",
        "That evening {kind} knocked at the door. It was {nature} and wanted to help.",
    ),
    "after": (
        "{N} thanked everyone and shared {his} {food}.",
        "{He} was so happy that {he} danced all the way home.",
        "People talked about it for weeks.",
        "{N} had learned that nobody has to do everything alone.",
        "{He} put the {o} in a safe place.",
    ),
    "morning": (
        "One {weather} morning the whole place was still asleep.",
        "The day began {weather} and calm.",
        "It was a {weather} morning in spring.",
    ),
    "meal": (
        "For breakfast there was {food}, as always.",
        "{N} packed some {food} for the way.",
        "On the table stood a bowl, a spoon and some {food}.",
    ),
    "road": (
        "The way led past {spot} and then through a dark wood.",
        "They walked for hours, first along the stream and then up a steep path.",
        "The road was long, and the sky was full of clouds.",
    ),
    "trouble": (
        "On the way they came to a broken bridge. They built a raft from three logs and crossed the water "
        "slowly.",
        "A big dog blocked the path. {N} gave it something to eat, and it let them pass.",
        "Suddenly they were lost in thick fog. They held hands and followed the sound of a bell.",
        "A fallen tree lay across the way. They pushed and pulled until there was room enough.",
    ),
    "night": (
        "When it grew dark they made a fire and told each other stories.",
        "They spent the night in a hut and listened to the rain.",
        "At night they slept under a tree, and the moon was bright.",
    ),
    "talk": (
        '"Are you tired?" asked {N}. "Not at all," was the answer.',
        '"Do you think we will make it?" asked {N}. "I am sure of it," was the reply.',
        '"We are nearly there," said {N}, and {he} was right.',
    ),
    "home": (
        "On the way back everything seemed shorter and easier.",
        "They went home singing, although it had begun to rain.",
        "The way home was easy, for the wind was behind them.",
    ),
    "feast": (
        "In the evening there was a feast with music and {food}.",
        "The neighbours came with lights and flowers and wanted to hear everything.",
        "Everybody sat around the big table and ate {food}.",
    ),
    "house": (
        "The house was small, with a blue door and a chimney that was always smoking.",
        "The rooms were low and warm, and in front of the window grew a rose.",
        "From the kitchen one could see the hills. Behind the house there were three apple trees.",
        "There was only one room, but it had the best view of all.",
    ),
    "people": (
        "The people there were friendly and talked a lot about the weather.",
        "Everybody knew everybody, and a secret never lasted longer than a day.",
        "There were few people, but many stories. The oldest ones were told in winter.",
        "On Sundays the children played ball until it was dark.",
    ),
    "leave": (
        "So {N} put on a coat, locked the door and set out.",
        "Before the sun was up {N} was on {his} way. The grass was still wet.",
        "{N} packed a bag, blew out the candle and went outside.",
    ),
    "meet": (
        "At a crossroads stood an old man with a cart. He pointed to the left and went on without a word.",
        "Soon they met a woman with a basket of eggs. She told them which way was the shortest.",
        "A boy with a stick and six sheep showed them the right path. He wanted nothing for it.",
    ),
    "rest": (
        "At noon they sat down on a wall and shared an apple.",
        "In the shade of a tree they rested for a while. A bird sang above them.",
        "They drank cold water from a well and washed their faces.",
    ),
    "moment": (
        "For a moment {N} stood still and looked around. Everything was silent.",
        "{N} took a deep breath. Now it had to be done.",
        "The decisive moment had come, and {N} was not afraid any more.",
    ),
    "evening": (
        "When they came home, a light was burning in every window.",
        "It was late when they saw the first roofs again. Dogs barked, and somebody opened a door.",
        "The sky was red when the journey was over.",
    ),
    "end": (
        "And they lived happily for many years.",
        "And {N} was happy.",
        "From that day on {N} was never lonely again.",
        "And the {o} stayed with {N} for the rest of {his} life.",
        "And if you go there today, you can still see the {o}.",
    ),
}

# Chapters of a long story, as beats.
CHAPTERS = (
    ("open", "house", "daily", "people", "morning", "meal", "start", "problem"),
    ("worry", "help", "leave", "road", "meet", "trouble", "talk", "rest", "night"),
    ("moment", "act", "home", "evening", "feast", "after"),
)

# What happens: how the object comes in, what goes wrong, how it is put right.
PLOTS: tuple[dict[str, tuple[str, ...]], ...] = (
    {  # lost
        "start": (
            "{His} greatest treasure was {an_o} that had belonged to {his} grandmother.",
            "{N} owned {an_o} and took it everywhere.",
        ),
        "problem": (
            "One {weather} day the {o} was gone. {N} looked under the bed, behind the door and in the "
            "garden, but "
            "found nothing.",
            "But one evening {he} reached into {his} bag, and the {o} was not there. {He} must have lost "
            "it on the "
            "way home.",
        ),
        "act": (
            "Together they searched every corner. At last they found the {o} in the grass near {spot}.",
            "They went back step by step, all the way to {spot}. There lay the {o}, wet but whole.",
        ),
    },
    {  # broken
        "start": (
            "For {his} work {he} needed {an_o}, and {he} took good care of it.",
            "{N} had made {an_o} with {his} own hands.",
        ),
        "problem": (
            "One {weather} day the {o} fell on the stones and broke into two pieces. Nobody {place} could "
            "mend it.",
            "But then the {o} broke, just before the great festival. There was no time to make a new one.",
        ),
        "act": (
            "They warmed some glue, put the pieces together and waited until morning. Then the {o} was as "
            "good as new.",
            "They worked all night with thread, wood and patience. In the morning the {o} was stronger "
            "than before.",
        ),
    },
    {  # storm
        "start": (
            "In {his} house there was {an_o} that nobody ever used.",
            "Above {his} door hung {an_o}, and nobody knew why.",
        ),
        "problem": (
            "One night a great storm came. A boat was in danger, and the people on it could not see the "
            "land.",
            "Then the river rose after days of rain. A child stood on a rock in the water and cried.",
        ),
        "act": (
            "They took the {o}, ran to {spot} and gave a sign with it. So everyone was saved.",
            "With the {o} in {his} hand {N} went first, step by step. An hour later everybody was safe at "
            "{spot}.",
        ),
    },
    {  # thief
        "start": (
            "One day {he} bought {an_o} at the market, and it shone like gold.",
            "On {his} birthday {N} got {an_o} as a present.",
        ),
        "problem": (
            "But a magpie saw the {o} and carried it off. It flew away over the roofs.",
            "In the night somebody took the {o} from the window. In the morning only a few footprints "
            "were left.",
        ),
        "act": (
            "They followed the trail to {spot}. The thief was only a lonely child, who gave the {o} back "
            "and said "
            "sorry.",
            "High up at {spot} they saw something shine. They climbed up and brought the {o} down again.",
        ),
    },
    {  # contest
        "start": (
            "Each year there was a contest at {spot}, and the prize was {an_o}.",
            "The mayor promised {an_o} to the one who could solve a riddle.",
        ),
        "problem": (
            "{N} wanted to win the {o} very much. But everybody else seemed faster and stronger.",
            "{N} tried three times and failed three times. The others began to laugh.",
        ),
        "act": (
            "They practised in secret, day after day. When the great day came, {N} won the {o}, and the "
            "others clapped.",
            "With a little help {he} saw what all the others had missed. So the {o} went to {N}.",
        ),
    },
    {  # gift
        "start": (
            "In a dusty corner {N} found {an_o} that belonged to nobody.",
            "A stranger once gave {N} {an_o} and said nothing more.",
        ),
        "problem": (
            "Soon strange things happened. Whenever {he} touched the {o}, it began to hum.",
            "But the {o} was heavy and cold, and at night it seemed to whisper. It wanted to go home.",
        ),
        "act": (
            "They carried the {o} to {spot} and laid it on the ground. At once it grew quiet, and flowers "
            "sprang up "
            "around it.",
            "Together they asked the oldest woman at {spot}. She knew the {o} from her childhood and told "
            "them its "
            "story.",
        ),
    },
    {  # journey
        "start": (
            "One day a message came: the queen needed {an_o}, and only {N} had one.",
            "{N} wanted to bring {an_o} to {his} sister, who lived far away.",
        ),
        "problem": (
            "The journey was long, and winter was near. After two days {he} did not know which way to go.",
            "But on the third day {his} shoes had holes and {his} bread was gone. The {o} felt heavier "
            "with every "
            "step.",
        ),
        "act": (
            "They took turns and carried the {o} over the pass. When they arrived, the doors stood wide "
            "open.",
            "They found a cart and a lazy horse. Before sunset the {o} was where it had to be.",
        ),
    },
    {  # quarrel
        "start": (
            "{N} and a neighbour both wanted the same {o}.",
            "At the market two people reached for the same {o}, and one of them was {N}.",
        ),
        "problem": (
            "They shouted so loudly that the birds flew away. In the end nobody wanted to speak to anybody.",
            "Each pulled at one end, and neither would let go. Soon all the neighbours took sides.",
        ),
        "act": (
            "The advice was simple: share it. So one had the {o} on even days and the other on odd days.",
            "They were told to close their eyes and count to ten. Then both had to laugh, and they used "
            "the {o} "
            "together.",
        ),
    },
)
