"""Word lists from which the structured-text generator draws."""

from __future__ import annotations

# fmt: off
FRUITS = [
    "apple", "banana", "cherry", "orange", "grape", "lemon", "mango", "peach", "pear", "plum", "melon", "kiwi",
    "fig", "lime", "apricot", "berry",
]
COLORS = [
    "red", "green", "blue", "yellow", "black", "white", "orange", "purple", "brown", "pink", "gray", "cyan", "gold",
    "silver",
]
ANIMALS = [
    "cat", "dog", "bird", "fish", "horse", "cow", "sheep", "goat", "lion", "tiger", "bear", "wolf", "fox", "mouse",
    "rabbit", "duck", "whale", "owl",
]
THINGS = [
    "house", "river", "table", "window", "book", "garden", "stone", "lamp", "door", "road", "ship", "letter",
    "bridge", "clock", "chair", "coat", "tree", "bell", "map", "paper", "glass", "bottle", "key", "box", "wheel",
    "engine", "tower", "field", "street", "pencil", "ball", "hat", "ring", "cup", "plate", "knife", "spoon", "rope",
]
NAMES = [
    "Ann", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Kate", "Leo", "Mary",
    "Nick", "Olivia", "Paul", "Rose", "Sam", "Tom", "Victor", "Wendy", "Alice", "Ben", "Clara", "Daniel", "Eva",
    "George", "Helen", "Ivan", "Jane", "Karl", "Lucy", "Mark", "Nora", "Oscar", "Peter", "Ruth", "Sarah", "Tim",
    "Anna", "John", "James", "Dave", "Eve", "Mike", "Lisa", "Max", "Laura", "Julia", "Martin",
]
SURNAMES = [
    "Smith", "Jones", "Brown", "Taylor", "Wilson", "Evans", "Walker", "White", "Hall", "Green", "Wood", "Clark",
    "King", "Baker", "Hill", "Cooper", "Ward", "Turner",
]
CITIES = [
    "London", "Paris", "Berlin", "Rome", "Madrid", "Vienna", "Oslo", "Dublin", "Lisbon", "Athens", "Prague",
    "Warsaw", "Boston", "Chicago", "Denver", "Tokyo", "Cairo",
]
COUNTRIES = [
    "France", "Spain", "Italy", "Germany", "England", "Norway", "Ireland", "Portugal", "Greece", "Poland", "Japan",
    "Egypt", "Austria",
]
VERBS = [
    "open", "close", "read", "write", "send", "load", "save", "start", "stop", "check", "run", "print", "move",
    "copy", "build", "find", "walk", "sing",
]
FIELDS = [
    "name", "age", "city", "color", "size", "price", "count", "width", "height", "weight", "status", "title",
    "score", "value", "email", "level", "type", "year", "code", "user", "host", "port", "path", "mode", "timeout",
    "enabled", "total", "index", "rate", "unit", "state", "key",
]
DAYS = [
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]
LEVELS = [
    "INFO", "INFO", "INFO", "DEBUG", "WARNING", "ERROR",
]
STATES = [
    "active", "inactive", "pending", "done", "open", "closed", "ready", "failed",
]
NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]
ORDINALS = [
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
]
PHRASES = [
    "the quick brown fox jumps over the lazy dog", "all work and no play makes a dull day", "to be or not to be",
    "hello world", "the rain in Spain stays mainly in the plain", "row row row your boat", "this is a test",
    "the cat sat on the mat", "one step at a time", "over the hills and far away", "round and round we go",
    "I will not talk in class", "please do not feed the birds", "the ship sails at dawn", "yes sir no sir",
    "tick tock", "left right left right", "the end is near", "a stitch in time saves nine", "la la la", "ha ha ha",
    "knock knock", "early to bed and early to rise", "good morning and good night", "keep calm and carry on",
    "we are going home",
]
SENTENCES = [
    "The sun rises in the east.", "Nothing happened today.", "The door is closed.", "I like green apples.",
    "We walked along the river.", "She said that it was late.", "The train leaves at noon.",
    "He opened the old book.", "The night was dark and cold.", "They waited for an answer.", "It is raining again.",
    "The wind blows from the north.", "Bread and butter.", "The clock struck twelve.", "Every word was true.",
    "The lamp went out.",
]
# fmt: on
