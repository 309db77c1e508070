extension TestDatabase {
    /// Makes every search for the tags `slow` wait at its first token, until `releaseSlowAudience`.
    public func slowAudience() throws {
        try psql(
            """
            CREATE TABLE public.hold (); INSERT INTO public.hold DEFAULT VALUES; GRANT SELECT ON public.hold TO PUBLIC;
            CREATE FUNCTION public.is_released() RETURNS boolean LANGUAGE plpgsql AS $$
            BEGIN
                WHILE EXISTS (SELECT FROM public.hold) LOOP PERFORM pg_sleep(0.01); END LOOP;
                RETURN true;
            END $$;
            DO $do$ BEGIN
                EXECUTE replace(
                    pg_get_functiondef('tokenkeeper.audience_condition(text, text, boolean, boolean)'::regprocedure), 'condition text := ',
                    $$condition text := CASE WHEN audience_condition.value = 'slow' THEN 'public.is_released() AND ' ELSE '' END || $$);
            END $do$
            """, user: "postgres")
    }

    public func releaseSlowAudience() throws {
        try psql("DELETE FROM public.hold", user: "postgres")
    }

    /// How many sessions search for an audience now.
    public func searchingSessions() throws -> Int {
        Int(
            try psql(
                """
                SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND state = 'active' AND query LIKE '%address_campaign%' AND pid <> pg_backend_pid()
                  AND wait_event = 'PgSleep'
                """, user: "postgres")) ?? 0
    }
}
