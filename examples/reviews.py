"""Writes reviews.csv: product reviews as a shop exports them, with a rating to predict.

    python examples/reviews.py
    persia init reviews.csv
    persia train reviews_model/config.toml

docs/guide/your-file.md goes on from there to a server that answers raw rows.
"""

import csv
import datetime
import random
import sys

WORDS = [
    "great",
    "good",
    "fine",
    "poor",
    "bad",
    "awful",
    "fast",
    "slow",
    "quiet",
    "cheap",
    "late",
    "lovely",
    "it",
    "was",
]
VALUE = {"great": 1, "good": 0.5, "lovely": 1, "poor": -0.5, "bad": -0.5, "awful": -1}
TAGS = ["kitchen", "garden", "toys", "office", "travel", "music"]
NAMES = ["review_id", "user_id", "item_id", "created_at", "price", "tags", "review", "weight", "rating"]


def write(path, rows=4000):
    draw = random.Random(0)
    time = datetime.datetime(2024, 1, 1, 8)
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(NAMES)
        for row in range(rows):
            user, item = draw.randrange(200), draw.randrange(100)
            time += datetime.timedelta(minutes=draw.randrange(15, 80))
            price = draw.lognormvariate(3 + 0.3 * (item % 5), 1)
            words = draw.choices(WORDS, k=draw.randint(4, 20))
            late = -0.5 if time.hour < 4 else 0
            taste = 0.2 * (item % 7 - 3) + 0.2 * (user % 5 - 2) + sum(VALUE.get(word, 0) for word in words) / 2
            rating = min(5, max(1, round(3.2 + taste + late + draw.gauss(0, 0.4))))
            out.writerow(
                [
                    f"r{row:05d}",
                    f"u{user}",
                    f"i{item}",
                    time,
                    "" if draw.random() < 0.1 else f"${price:,.2f}",
                    "|".join(draw.sample(TAGS, 1 + item % 3)),
                    " ".join(words),
                    draw.choice(["0.5", "1", "2"]),
                    rating,
                ]
            )


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else "reviews.csv")
