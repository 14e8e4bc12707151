"""Tests of rewards: fair to right answers, hard to game?"""
