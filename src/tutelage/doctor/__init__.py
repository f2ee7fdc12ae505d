"""Preflight checks: do student, teachers, engines, data and machine fit together?"""
