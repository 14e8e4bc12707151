"""Tests of rewards: fair to correct answers, hard to game?"""
