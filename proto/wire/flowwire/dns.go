// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flowwire

import "fmt"

// queryTypes are the names of the types of questions that resolvers use.
var queryTypes = map[uint32]string{
	1: "A", 2: "NS", 5: "CNAME", 6: "SOA", 12: "PTR", 15: "MX", 16: "TXT", 28: "AAAA", 33: "SRV", 35: "NAPTR", 39: "DNAME",
	43: "DS", 46: "RRSIG", 48: "DNSKEY", 52: "TLSA", 64: "SVCB", 65: "HTTPS", 255: "ANY", 257: "CAA",
}

// QueryType returns the name of the type of a question, such as "A" or "TYPE1234".
func QueryType(n uint32) string {
	if name, ok := queryTypes[n]; ok {
		return name
	}
	return fmt.Sprintf("TYPE%d", n)
}

// responseCodes are the names of response codes (RFC 1035).
var responseCodes = []string{"NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"}

// ResponseCode returns the name of a response code, such as "NXDOMAIN" or "RCODE11".
func ResponseCode(n uint32) string {
	if n < uint32(len(responseCodes)) {
		return responseCodes[n]
	}
	return fmt.Sprintf("RCODE%d", n)
}
