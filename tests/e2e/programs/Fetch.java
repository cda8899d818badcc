// Java's HttpClient. Proxy and trust store come from properties; a password for the proxy has to come from code: not
// from an Authenticator, with which this client takes out an Authorization that the program has set.
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.Base64;

public class Fetch {
  public static void main(String[] arguments) throws Exception {
    HttpClient client = HttpClient.newHttpClient();
    String proof = System.getenv("PROXY_PASSWORD");
    for (int turn = 0; turn < 2; turn++) {
      var request = HttpRequest.newBuilder(URI.create(System.getenv("TARGET_URL") + "/echo"))
          .header("Authorization", "Bearer " + System.getenv("API_KEY"));
      if (proof != null) {
        String basic = Base64.getEncoder().encodeToString(("x:" + proof).getBytes());
        request.header("Proxy-Authorization", "Basic " + basic);  // sent with CONNECT alone
      }
      var response = client.send(request.build(), BodyHandlers.ofString());
      if (response.statusCode() != 200) throw new IOException(response.statusCode() + " " + response.body());
      System.out.println(response.statusCode() + " " + response.headers() + " " + response.body());
    }
  }
}
