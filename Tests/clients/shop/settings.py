import os

SECRET_KEY = "x"
USE_TZ = True
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql", "NAME": "push", "USER": "django",
        "HOST": os.environ["PGHOST"], "PORT": os.environ["PGPORT"],
    }
}  # fmt: skip
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "rest_framework", "push_notifications"]
REST_FRAMEWORK = {"DEFAULT_AUTHENTICATION_CLASSES": []}
PUSH_NOTIFICATIONS_SETTINGS = {
    "CONFIG": "push_notifications.conf.AppConfig",
    "UPDATE_ON_DUPLICATE_REG_ID": True,
    "APPLICATIONS": {
        name: {
            "PLATFORM": "APNS", "AUTH_KEY_PATH": os.environ["APNS_KEY"], "AUTH_KEY_ID": os.environ["APNS_KEY_ID"],
            "TEAM_ID": os.environ["APNS_TEAM_ID"], "TOPIC": "com.example.app", "USE_SANDBOX": name == "ios-dev",
        }
        for name in ("ios", "ios-dev")
    },
}  # fmt: skip
