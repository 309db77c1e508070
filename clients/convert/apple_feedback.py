"""Converts what Apple's feedback service sent until 2021, saved as it came, to CSV for `tokenkeeperd import --feedback`.

    apple_feedback.py feedback.bin > feedback.csv

Each tuple is four bytes of time, two bytes of length, and the token, in network byte order.
"""
import struct
import sys


def main(path):
    print("token,timestamp")
    with open(path, "rb") as file:
        while head := file.read(6):
            if len(head) < 6:
                sys.exit("the last tuple is cut off")
            at, length = struct.unpack(">IH", head)
            token = file.read(length)
            if not 1 <= length <= 512 or len(token) < length:
                sys.exit(f"byte {file.tell() - len(token) - 6}: no tuple. Nothing from there on is converted")
            print(f"{token.hex()},{at}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
