-- No function is for everybody: grants.sql says who may call which. A migration is one transaction, so nobody could call one before this.

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA tokenkeeper FROM PUBLIC;
