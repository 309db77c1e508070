internal import TokenLedger

/// What the summary counts of a row that was not refused.
extension ImportRules {
    func traits(of row: ImportRow) -> ImportSummary.Traits {
        var traits = ImportSummary.Traits(logsOut: (try? isUnregistered(row)) ?? false)
        for field in ImportField.allCases where value(field, row) != nil || field == .tags && row.tagList != nil {
            traits.fields |= 1 << field.rawValue
        }
        traits.topic = value(.topic, row).map { range in
            let text = Array(row.bytes[range])
            return topics[text]?.topic ?? text
        }
        return traits
    }

    /// What becomes of rows without a time: the end of a sentence.
    var timeless: String {
        if isComplete { return "registered in 1970, so that they revive no dead token" }
        let word = queue == .registration ? "registered" : "dead"
        return "\(word) at \(CopyText.text(asOf)) (\(isAsOfGiven ? "--as-of" : "when the file was written"))"
    }
}
